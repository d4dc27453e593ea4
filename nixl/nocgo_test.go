//go:build !cgo

package nixl

const haveCgo = false
