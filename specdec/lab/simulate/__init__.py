"""`specdec simulate`: the real coordinator and workers on simulated devices, in virtual time.

`virtual_time` makes time; `scenario` says what is simulated and `devices` is what it runs on; `simulate` runs
it; `recording` keeps what happened, from which `report` and `trace` are made.
"""
