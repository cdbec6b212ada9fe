"""The router: owns every request and its text. Admits, places, dispatches, replays; never touches a tensor."""
