// Package faultengine is an engine for tests: it wraps another one and makes go wrong what a
// test says, at the point where the test says it.
//
// A test adds rules. A rule says which calls it is for (posts, loads or arriving notifications,
// of one peer or of any), how many of them it lets pass, how many it takes after that, and what
// becomes of those. The handle that Add gives counts what the rule has taken, waits for it, and
// lets go what the rule holds back.
//
// What is held back is not pretended: a write that stalls is given to the wrapped engine only
// when it is let go, so that its bytes land then, into whatever the memory is used for by that
// time. A late one has landed, and only its completion is held back.
package faultengine
