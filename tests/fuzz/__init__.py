"""Fuzz targets of the parsers of untrusted bytes, and the inputs that fuzzing has found.

    targets     one function per parser, which checks it with any bytes
    seeds       first inputs, from the test vectors and small journals
    run         `python -m tests.fuzz.run TARGET`: search for new inputs with atheris
    corpus      inputs that reach different code, one folder per target

The tests check all targets with all inputs of the corpus. Fuzzing itself is not part of them.
"""
