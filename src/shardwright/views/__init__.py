"""Views: the layout of what a view sees, and what it is of a local tensor. No communication, ever."""
