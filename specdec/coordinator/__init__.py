"""The coordinator: sequences, lanes, rounds. Talks to workers through handles and knows nothing of Ray."""
