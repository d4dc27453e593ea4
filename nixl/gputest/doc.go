// Package gputest holds the tests that need an NVIDIA GPU, behind the build tag gpu. They
// register memory that the CUDA driver allocated, move it between two processes over the
// native engine and compare every byte. make test-gpu runs them.
//
// Where there is no GPU, or no NIXL library, each test is skipped and says so; with
// NIXLKV_TEST_GPU set it fails instead.
package gputest
