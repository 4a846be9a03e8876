"""Renting machines for a run: jobs on Hugging Face, hosts over ssh, pods in a cluster.

Whoever rents them schedules them: nothing here decides where anything runs. `hub` talks to the platform, `follow`
says what is started again, `state` is the small file by which `rolecall launch status` and `stop` find a launch.
"""
