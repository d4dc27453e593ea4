// Package ratelog logs what peers can cause without letting them fill the log.
package ratelog

import (
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// every is the least time between two lines.
const every = 100 * time.Millisecond

// Logger logs at most ten warnings a second and counts the rest. It may be used from many
// goroutines.
type Logger struct {
	log        *zap.Logger
	last       atomic.Int64 // when a line was logged, in nanoseconds
	suppressed atomic.Uint64
}

// New gives a logger over another one.
func New(l *zap.Logger) *Logger { return &Logger{log: l} }

// Warn logs a warning, unless there were too many just now.
func (l *Logger) Warn(msg string, fields ...zap.Field) {
	now, last := time.Now().UnixNano(), l.last.Load()
	if now-last < int64(every) || !l.last.CompareAndSwap(last, now) {
		l.suppressed.Add(1)
		return
	}
	l.log.Warn(msg, fields...)
}

// Suppressed counts the lines left out.
func (l *Logger) Suppressed() uint64 { return l.suppressed.Load() }

// Sampled gives a logger that writes a message at most five times a second, at each level.
func Sampled(l *zap.Logger) *zap.Logger {
	return l.WithOptions(zap.WrapCore(func(core zapcore.Core) zapcore.Core {
		return zapcore.NewSamplerWithOptions(core, time.Second, 5, 0)
	}))
}
