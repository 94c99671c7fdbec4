"""One `generate` call with a draft, from the dispatch on `assistant_model=` to the finished text.

`loop` runs the rounds; every other module implements one step of a round or one aspect of the call.
"""
