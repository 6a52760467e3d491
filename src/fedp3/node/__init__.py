"""A device that takes part in runs of others: what it stores, what it allows, what it refuses.

A node trusts no server.  Its owner writes a policy file, and the node checks every message against
it before anything is done.  Nothing in this package knows Flower, which only carries messages.

- `policy`: what the owner allows, as a commented TOML file.
- `context`: what a node trains with.
- `admission`: the checks of a message and of a task; every refusal has a code.
- `refusal`: these codes; a server sees a code and never a text with values of the data.
- `records`: which records train and which are scored, and marks of those that trained under LDP.
- `account`: charges of updates and scores in the node's own ledger.
- `states`: personal layers on disk, bound to the run that made them.
- `permits`: signatures of run owners, made off the server.
- `prepared`: the samples of a client, computed once for a config.
- `folder`: where all of this is stored, and who owns it.
- `status`: what `fedp3 node status` shows.
"""
