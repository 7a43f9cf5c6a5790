"""How an arrow is carried out: devices, collectives, and the four modes that run one model text."""
