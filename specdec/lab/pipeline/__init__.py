"""How much of what two devices could give is reached: real coordinator, simulated devices."""
