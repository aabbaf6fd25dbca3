"""Tasks are checked before they are trained on: each one's oracle is played, and doing nothing, and what must
be hidden from the agent is looked for where the agent would find it.
"""
