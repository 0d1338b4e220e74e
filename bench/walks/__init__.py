"""How many functions and files of the package a call walks through, beside torch's DTensor.

A walk is one call of the library. What is counted, for both libraries alike:

* calls: each time that the interpreter enters a frame whose code lies in a file of the library, as profilers
  count. A generator that is resumed is entered again, and each comprehension is a frame of its own (Python
  3.11; from 3.12 on list, dict and set comprehensions have none, and numbers can only be smaller). Not
  counted: C++, and what has no file, such as the methods that `dataclasses` write.
* files: the files that hold those frames.
* changes: how often a call lands in another sub-package (first folder) than the call before it.

Our library is the package `shardwright`; torch's is all of `torch/distributed`, and what ours calls there is
not counted. The world is one process that believes to be rank 0 of 2 (the `fake` backend), so that nothing
depends on a peer. Tensors are 8 x 8.

A first call runs in a process that has imported everything and run an unrelated op, and knows nothing else:
each walk is counted in a child of its own. A known call is one that ran three times before.

Our numbers are the same in every run. Torch's backward varies by a few calls: its C++ cache compares the
specs that fall in one bucket, and buckets go by addresses.
"""
