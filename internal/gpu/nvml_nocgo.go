//go:build linux && !cgo

package gpu

// listNVML cannot ask: go-nvml is a cgo package.
func listNVML() ([]nvmlGPU, []string, error) { return nil, nil, ErrNoCgo }
