"""The draft service: a disposable maker of token trees. Drafters dial verify services; they hold no truth."""
