package interop

import "github.com/nixlkv/nixlkv/nixl"

// impl is whose code a rank runs: this library's on a NIXL engine, or SGLang's.
type impl struct {
	engine nixl.Kind
	sglang *release // nil: this library
}

func sglang(r release) impl { return impl{sglang: &r} }

func golang(engine nixl.Kind) impl { return impl{engine: engine} }

func (i impl) String() string {
	if i.sglang != nil {
		return i.sglang.String()
	}
	return "Go"
}

// thisLibrary stands for this library where a release is asked for: what the decode of the newest
// release listens to, this one does too.
var thisLibrary = release{Minor: 23}

// standsFor gives the release whose decode listens to the same.
func (i impl) standsFor() release {
	if i.sglang != nil {
		return *i.sglang
	}
	return thisLibrary
}
