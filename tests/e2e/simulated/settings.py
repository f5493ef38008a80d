"""What is served here, and how long a request waits for a worker."""

from pathlib import Path

FILE = Path(__file__).parents[3] / "deployments" / "simulated.yaml"
IDLE_WAIT_S = 3.0
