package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// progress is a line on a terminal that is written over and over. A nil one shows nothing.
type progress struct {
	w           io.Writer
	done, total int
}

// newProgress gives nil unless the file is a terminal.
func newProgress(f *os.File) *progress {
	if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err != nil {
		return nil
	}
	return &progress{w: f}
}

// startOfLine goes there and clears the line.
const startOfLine = "\r\x1b[K"

// say shows what is being done.
func (p *progress) say(what string) {
	if p != nil {
		fmt.Fprintf(p.w, startOfLine+"%s…", what)
	}
}

// begin shows a bar for a number of requests.
func (p *progress) begin(total int) {
	if p != nil {
		p.total = total
		p.draw()
	}
}

// step says that one more of them has been sent.
func (p *progress) step() {
	if p != nil {
		p.done++
		p.draw()
	}
}

const barWidth = 40

func (p *progress) draw() {
	n := barWidth * p.done / max(p.total, 1)
	fmt.Fprintf(p.w, startOfLine+"%s%s %d of %d requests", strings.Repeat("█", n), strings.Repeat("░", barWidth-n), p.done, p.total)
}

// end clears the line.
func (p *progress) end() {
	if p != nil {
		fmt.Fprint(p.w, startOfLine)
	}
}
