"""Channel names and patterns, and indexes that find the patterns matching a name.

Modules in reading order:
    pattern               legal names and patterns, matching, overlap
    explain_mismatch      explanations of patterns that nearly match
    sharded_dict          dict for very many entries, which grows in small steps
    paged_set             set for very many values, which are iterated fast
    matches               values of the patterns that match a name
    pattern_index         bitmap index of patterns with wildcards
    subscription_index    values by pattern, with a cache of matches

Imports only the leaf modules of `core`.
"""
