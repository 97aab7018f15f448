"""Run directories, as people ask about them: found, continued, diagnosed, stopped, shown and exported."""
