package metadata

import (
	"fmt"

	"github.com/nixlkv/nixlkv"
)

// Release is a release of SGLang whose slots this package knows. The zero value is none.
type Release uint8

// The known releases. 0.5.18 to 0.5.20 write the same bytes, 0.5.21 and 0.5.22 as well;
// 0.5.23 has the layout of 0.5.21 and uses one more word of it.
const (
	SGLang0518 Release = iota + 1
	SGLang0519
	SGLang0520
	SGLang0521
	SGLang0522
	SGLang0523
)

var releaseNames = [...]string{"unknown", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"}

// Releases gives all known releases, oldest first.
func Releases() []Release {
	return []Release{SGLang0518, SGLang0519, SGLang0520, SGLang0521, SGLang0522, SGLang0523}
}

// String gives the version number, as in "0.5.23".
func (r Release) String() string {
	if int(r) < len(releaseNames) {
		return releaseNames[r]
	}
	return fmt.Sprintf("Release(%d)", uint8(r))
}

// ParseRelease reads a version number. Of a release that it does not know it says so with
// nixlkv.ErrUnsupported: a later one may have other buffers.
func ParseRelease(version string) (Release, error) {
	for _, r := range Releases() {
		if version == r.String() {
			return r, nil
		}
	}
	return 0, fmt.Errorf("metadata: %w: SGLang release %q", nixlkv.ErrUnsupported, version)
}

func (r Release) known() bool { return r >= SGLang0518 && r <= SGLang0523 }

// supportLogprobs: a sampling mask can come with the logprob of each of its tokens, and so
// their buffer is M wide instead of 16 (MetadataBuffers.__init__ of 0.5.21).
func (r Release) supportLogprobs() bool { return r >= SGLang0521 }

// absentMasks: a mask length of -1 says that the request asked for a mask and the sampler
// gave none (MetadataBuffers.set_buf up to 0.5.20; later ones abort such a request).
func (r Release) absentMasks() bool { return r <= SGLang0520 }

// checksums: there can be a kv_checksum buffer (MetadataBuffers.__init__ of 0.5.21).
func (r Release) checksums() bool { return r >= SGLang0521 }

// signatures: kv_checksum[1] is the signature of the layout that the digest was taken of
// (MetadataBuffers.set_kv_checksum of 0.5.23; before, the word stays zero).
func (r Release) signatures() bool { return r >= SGLang0523 }
