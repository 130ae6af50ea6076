"""Labels by debate, for routers that must know what an agent can do (Debate-to-Skill)."""
