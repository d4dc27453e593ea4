module github.com/nixlkv/nixlkv

go 1.25.0

require (
	github.com/NVIDIA/go-nvml v0.13.4-1
	github.com/ebitengine/purego v0.11.3
	github.com/pebbe/zmq4 v1.4.0
	go.uber.org/goleak v1.3.0
	go.uber.org/zap v1.28.0
	golang.org/x/sys v0.41.0
	pgregory.net/rapid v1.3.0
)

require go.uber.org/multierr v1.10.0 // indirect
