"""What an operator sees: health, metrics, the page, and the shapes that NATS tools read.

Rule 1: pure. Snapshots, questions and a clock reading in; bytes out. Sockets are the business of
`server`.
Rule 2: nothing that is asked here changes the bus, and every answer is bounded.

    facts       what a program says of itself: health, figures, tables, sentences
    requests    a question and its answer, and which path is answered by whom
"""
