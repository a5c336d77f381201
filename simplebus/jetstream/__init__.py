"""A door before a JetStream cluster: `simplebus serve --engine` (protocol/engine.md).

    names  settings  consumers      what things are called there, and what JetStream is told of them
    content                         frames as messages of a stream, and the way back
    uplink  lanes  refusals         lots of the commit_log become encode_publications; PubAcks become confirms
    classes  feed                   a position's own ring, filled from its consumer; acks go back
    dating                          when what it was fed was accepted, by the door's clock
    sole                            a consumer that is one door's alone: acks of all up to a message
    awaited                         what was given back to a consumer, and does not come
    link                            a connection to one of several servers (trio)
    positions  listening  others    streams and consumers, made and found; other doors (trio)
    jobs  closing  trimming         what is asked of them one after the other, and later (trio)
    stored  counting                what lies in streams: messages; how many, and for whom (trio)
    growing  fitting  identity      what a cluster is to be for a door to stand before it (trio)
    listing  naming                 all streams and consumers; what classes are called (trio)
    cluster                         between the broker and all of these (trio)

Rule 1: the broker stays as it is. A class keeps nothing but what is on its way to the cluster; who
is sent what, when, how often and until when is decided by positions, as ever.
Rule 2: what is confirmed is in the cluster; what is acknowledged there was acknowledged here. In
between a message may be delivered again, and is never lost.
Rule 3: a door has no state that another one could not do without.
"""
