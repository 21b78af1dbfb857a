"""What a trainer measures of itself: timers on its device or its CPU, and how that leaves it without waiting."""
