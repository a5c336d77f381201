"""The commands of `simplebus`, a file each, and the flags that several of them share."""
