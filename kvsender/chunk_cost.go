package kvsender

// What decides how a chunk is described, in nanoseconds of CPU time for one side, measured by
// BenchmarkChunkNative with NIXL 1.5.1: an index costs about 2, whatever NIXL then merges. A
// descriptor costs about 13 more than one that NIXL has merged of indices, since it is
// appended to a list and looked up among the registered regions. Only the ratio matters.
const (
	indexCost = 2
	descCost  = 13
)

// cheaperByDesc says whether a chunk of so many pages in so many runs is better described
// anew than picked by index from the prepared lists: it is from about seven pages a run on.
func (s *segment) cheaperByDesc(pages, runs int) bool {
	return s.descriptors(pages, runs)*descCost < pages*s.rows()*indexCost
}
