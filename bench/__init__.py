"""Speed, as ratios: what is measured side by side, and the tools for that."""

import outrider as outrider  # before gRPC is imported
