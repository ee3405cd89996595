"""One step of one model: streams read pushes and answer them, the model decides, the applier logs and applies.

A StepStream owns its transport; a ShardModel owns the Tracker, the Applier with the region that readers see, and the
pushes that wait for their round.
"""
