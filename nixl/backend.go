package nixl

import (
	"fmt"
	"strings"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// Backend is a transport that an agent created. It lives as long as the agent.
type Backend struct {
	a    *Agent
	raw  engine.Backend
	name string
}

// Plugins names the backends that could be created: those whose plugin the library found.
func (a *Agent) Plugins() ([]string, error) {
	if err := a.enter(); err != nil {
		return nil, a.fail("plugins", "", err)
	}
	defer a.leave()
	p, err := a.raw.Plugins()
	return p, a.fail("plugins", "", err)
}

// PluginParams gives a plugin's parameters with their defaults, and the kinds of memory
// that it serves.
func (a *Agent) PluginParams(plugin string) (map[string]string, []Mem, error) {
	call := "parameters of plugin " + plugin
	if err := a.enter(); err != nil {
		return nil, nil, a.fail(call, "", err)
	}
	defer a.leave()
	p, m, err := a.raw.PluginParams(plugin)
	return p, m, a.fail(call, "", err)
}

// CreateBackend creates a further backend. NewAgent has created the first.
func (a *Agent) CreateBackend(plugin string, params map[string]string) (*Backend, error) {
	call := "create backend " + plugin
	if err := a.enter(); err != nil {
		return nil, a.fail(call, "", err)
	}
	defer a.leave()
	if strings.ContainsRune(plugin, 0) {
		return nil, a.fail(call, "", fmt.Errorf("%w: a zero byte in its name", StatusInvalidParam))
	}
	for k, v := range params {
		if strings.ContainsRune(k, 0) || strings.ContainsRune(v, 0) {
			return nil, a.fail(call, "", fmt.Errorf("%w: a zero byte in parameter %q", StatusInvalidParam, k))
		}
	}
	b, err := a.raw.CreateBackend(plugin, params)
	if err != nil {
		return nil, a.fail(call, "", err)
	}
	return &Backend{a: a, raw: b, name: plugin}, nil
}

// Name gives the plugin's name.
func (b *Backend) Name() string { return b.name }

// Params gives the parameters in force and the kinds of memory that the backend serves.
func (b *Backend) Params() (map[string]string, []Mem, error) {
	call := "parameters of backend " + b.name
	if err := b.a.enter(); err != nil {
		return nil, nil, b.a.fail(call, "", err)
	}
	defer b.a.leave()
	p, m, err := b.a.raw.BackendParams(b.raw)
	return p, m, b.a.fail(call, "", err)
}
