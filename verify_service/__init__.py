"""The target model's owner: sessions, scheduling, acceptance, and the two streams that leave from it. Knows no text."""
