"""Lightning 2.4 to 2.6 under either name of its package: memory saves every N optimizer steps, resume from the newest.

``hooks`` is what the agent's patches call, ``session`` is one fit, ``kinds`` knows how each strategy spreads its state
over the ranks. A file that the recipe saves itself is never touched, and never mentions us.
"""
