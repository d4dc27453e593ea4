package kvsender

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/nixlkv/nixlkv"
)

func TestFromEnv(t *testing.T) {
	for _, tc := range []struct {
		env  map[string]string
		want error
		n    int
	}{
		{nil, nil, 0},
		{map[string]string{EnvBootstrapTimeout: "12", EnvQueueSize: "2", EnvAllCPRanks: "yes", EnvForceQuery: "1", EnvStagingBuffer: "0"}, nil, 4},
		{map[string]string{EnvNIXLBackend: "UCX", EnvNIXLParams: `{"num_threads":"3"}`}, nil, 1},
		{map[string]string{EnvNIXLParams: `{"num_threads":3}`}, nixlkv.ErrMalformed, 0},
		{map[string]string{EnvNIXLParams: `[]`}, nixlkv.ErrMalformed, 0},
		{map[string]string{EnvBootstrapTimeout: "soon"}, nixlkv.ErrMalformed, 0},
		{map[string]string{EnvAllCPRanks: "maybe"}, nixlkv.ErrMalformed, 0},
		{map[string]string{EnvStagingBuffer: "true"}, nil, 1},
		{map[string]string{EnvStagingBuffer: "perhaps"}, nixlkv.ErrMalformed, 0},
	} {
		opts, err := fromEnv(func(k string) (string, bool) { v, ok := tc.env[k]; return v, ok })
		if !errors.Is(err, tc.want) || len(opts) != tc.n {
			t.Errorf("%v: %d options, %v", tc.env, len(opts), err)
		}
	}
	opts, err := fromEnv(func(k string) (string, bool) { return "7", k == EnvBootstrapTimeout })
	ok(t, err)
	c := defaultConfig()
	for _, o := range opts {
		o(&c)
	}
	if c.bootstrapTimeout != 7*time.Second || !slices.Equal([]int{c.workers}, []int{DefaultWorkers}) {
		t.Errorf("config %+v", c)
	}
}
