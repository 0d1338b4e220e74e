"""What ranks that compile want: imported for the modules, and for one measurement that is left out.

For its log torch measures what the guards of each graph take, after it has emptied the processor's caches by
writing 100 MB and more: 20 ms of the 70 that a small graph takes.
"""

import torch._dynamo.backends.debugging
import torch._dynamo.guards
import torch._dynamo.repro.after_dynamo
import torch._inductor.lowering
import torch._inductor.pattern_matcher
import torch.export._trace

torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
