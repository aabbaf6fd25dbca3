"""The Celery fleets that carry rollouts through INIT, RUN and EVAL."""
