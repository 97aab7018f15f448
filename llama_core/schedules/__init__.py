"""Pipeline schedules as data, and the clock that times them."""
