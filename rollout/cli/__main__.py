from rollout.cli import main

main(prog_name="rollout")
