"""What ``autoparallel export --to python`` copies into a script: plain PyTorch, no import of ours.

A script gets the definitions that it uses, as they stand in these modules, and what they use in
turn. So nothing here imports anything that a script may not need.
"""
