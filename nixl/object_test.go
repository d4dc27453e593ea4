package nixl

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
)

// objectStore is as much of an S3 server as NIXL's OBJ backend needs.
type objectStore struct {
	mu      sync.Mutex
	objects map[string][]byte // by path
}

func (s *objectStore) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch r.Method {
	case http.MethodPut:
		b, err := io.ReadAll(r.Body)
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		s.objects[r.URL.Path] = b
	case http.MethodGet:
		b, ok := s.objects[r.URL.Path]
		var first, last int
		if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &first, &last); !ok || err != nil || first > last || last >= len(b) {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(b)))
		w.WriteHeader(http.StatusPartialContent)
		w.Write(b[first : last+1])
	default:
		w.WriteHeader(http.StatusMethodNotAllowed)
	}
}

func (s *objectStore) get(path string) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.objects[path]
}

// TestObjects moves memory to an object store and back, over the OBJ backend.
func TestObjects(t *testing.T) {
	const size = 1 << 16
	eachNative(t, func(t *testing.T, c engineCase) {
		store := &objectStore{objects: map[string][]byte{}}
		srv := httptest.NewServer(store)
		t.Cleanup(srv.Close)
		a := newStorageAgent(t, c.open(t), "OBJ", map[string]string{
			"endpoint_override": srv.URL, "scheme": "http", "bucket": "kv", "region": "us-east-1",
			"access_key": "key", "secret_key": "secret", "req_checksum": "required", "resp_checksum": "required",
		})
		buf := alloc(t, 2*size)
		fillPattern(buf.Bytes(), 1)
		wrote := bytes.Clone(buf.Bytes())
		must[*Registration](t)(a.Register(Host(buf)))
		objects := must[*Registration](t)(a.Register(Object("layer/0", 5, size), Object("layer/1", 6, size), Object("missing", 7, size)))
		self := must[*Remote](t)(a.Self())

		local := must[*List](t)(a.NewList(DRAM))
		check(t, local.AppendRuns(Run{Addr: uint64(buf.Addr()), Len: size, Stride: size, Count: 2}))
		remote := must[*List](t)(a.NewList(MemObject))
		check(t, remote.Append(Desc{Len: size, Dev: 5}, Desc{Len: size, Dev: 6}))
		x := a.NewTransfer()
		check(t, x.Create(Write, local, self, remote, TransferOptions{Post: true}))
		wait(t, x)
		check(t, x.Release())
		for i, path := range []string{"/kv/layer/0", "/kv/layer/1"} {
			if !bytes.Equal(store.get(path), wrote[i*size:][:size]) {
				t.Errorf("%s holds other bytes than were written", path)
			}
		}

		// Back, in the other order, and from the middle of an object.
		clear(buf.Bytes())
		check(t, local.Clear())
		check(t, local.Append(Desc{Addr: uint64(buf.Addr()), Len: size}, Desc{Addr: uint64(buf.Addr()) + size, Len: 100}))
		check(t, remote.Clear())
		check(t, remote.Append(Desc{Len: size, Dev: 6}, Desc{Addr: 1000, Len: 100, Dev: 5}))
		check(t, x.Create(Read, local, self, remote, TransferOptions{Post: true}))
		wait(t, x)
		want := make([]byte, 2*size)
		copy(want, wrote[size:])
		copy(want[size:], wrote[1000:1100])
		if !bytes.Equal(buf.Bytes(), want) {
			t.Error("memory does not hold what was read, or more")
		}
		wantErr(t, "deregister under a transfer", objects.Deregister(), ErrInUse)
		check(t, x.Release())

		// What is not there fails, and only that.
		check(t, local.Clear())
		check(t, local.Append(Desc{Addr: uint64(buf.Addr()), Len: size}))
		check(t, remote.Clear())
		check(t, remote.Append(Desc{Len: size, Dev: 7}))
		check(t, x.Create(Read, local, self, remote, TransferOptions{Post: true}))
		var err error
		for st := InProgress; st == InProgress; {
			st, err = x.Status()
		}
		wantErr(t, "read an object that is not there", err, errStorage)
		wantErr(t, "usable", self.usable(), nil)
		check(t, x.Release())
		check(t, objects.Deregister())
	})
}

// TestStorageAsNIXLTakesIt: offsets, numbers and keys are where NIXL looks for them.
func TestStorageAsNIXLTakesIt(t *testing.T) {
	for _, tc := range []struct {
		r         Region
		mem       Mem
		addr, len uint64
		dev       uint64
		meta      string
	}{
		{File(3, 4096, 100), MemFile, 4096, 100, 3, ""},
		{Object("a/b", 9, 100), MemObject, 0, 100, 9, "a/b"},
		{Block(11, 1<<40, 512), MemBlock, 1 << 40, 512, 11, ""},
	} {
		check(t, tc.r.validate(0))
		raw := tc.r.raw()
		if tc.r.Mem() != tc.mem || raw.Addr != tc.addr || raw.Len != tc.len || raw.Dev != tc.dev || string(raw.Meta) != tc.meta || raw.FD != -1 {
			t.Errorf("%+v became kind %d, %+v", tc.r, tc.r.Mem(), raw)
		}
	}
}

// TestNoBackendForStorage: UCX, which every agent has, serves none of it.
func TestNoBackendForStorage(t *testing.T) {
	eachNative(t, func(t *testing.T, c engineCase) {
		a := newAgent(t, c.open(t))
		for _, r := range []Region{File(0, 0, 1), Object("key", 7, 1), Block(3, 0, 1)} {
			_, err := a.Register(r)
			wantErr(t, "register", err, StatusNotFound)
		}
	})
}
