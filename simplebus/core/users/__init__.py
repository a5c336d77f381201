"""Users of a bus: authentication, permissions and publish rates.

Modules in reading order:
    users               user table and authentication
    user_directory      current users, which a reload replaces
    passwords           password hashes, and passwords verified before
    certificate_names   normal form of names in client certificates
    nkeys               public keys of NATS users
    permissions         permissions of one user, by class and channel
    subject_permissions permissions of one user for NATS subjects
    rate_limit          limits on published messages and bytes per second

Imports `protocol`, `channel` and the leaf modules of `core`.
"""
