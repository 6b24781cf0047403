# What docs/deploy.md has the operator do on the server's host; compose.yaml runs it.
mkdir -p ~/.flwr
cat > ~/.flwr/config.toml <<'END'
[superlink]
default = "study"

[superlink.study]
address = "127.0.0.1:8001"
root-certificates = "/keys/ca.crt"
END
for site in a b c; do
    flwr supernode register "/keys/$site.pub" --name "$site" || echo "$site: see above; a site is registered once"
done
fedkeep flower new study --recipe demo --methods fedavg,sfedkd --seeds 0 --rounds 3 --sites 3 --set partition.classes_per_client=4
flwr run study --stream --run-config 'out="/runs/study" settings="run.min_clients=2"'
