//go:build !race

package interop

const raceDetector = false
