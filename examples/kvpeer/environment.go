package main

import (
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"strconv"
)

// setEnvironment sets the variables of the configuration. It comes before NIXL is loaded,
// which like UCX reads its own variables then; with cgo, os.Setenv sets C's as well.
func (c *config) setEnvironment() error {
	for name, value := range c.Env {
		if err := os.Setenv(name, variable(value)); err != nil {
			return fmt.Errorf("%w: variable %q: %w", errConfig, name, err)
		}
	}
	return nil
}

// variable gives a JSON value as SGLang's peers put it into the environment.
func variable(v any) string {
	switch v := v.(type) {
	case string:
		return v
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64)
	case bool:
		if v {
			return "True"
		}
		return "False"
	}
	return fmt.Sprint(v)
}

// localIP is where the control socket listens. SGLang's variable comes before host_ip.
func (c *config) localIP() (string, error) {
	ip := cmp.Or(os.Getenv("SGLANG_HOST_IP"), c.HostIP)
	if _, err := netip.ParseAddr(ip); err != nil {
		return "", fmt.Errorf("%w: host_ip: %w", errConfig, err)
	}
	return ip, nil
}
