package wire

// PrefillPosition is where a prefill rank stands. Sizes are at least 1, ranks below them.
type PrefillPosition struct {
	TPRank         int // attention TP rank
	PPSize, PPRank int
	CPSize, CPRank int // attention CP
}

// Rank gives the number by which KV_STATUS and ABORT_ACK name a prefill rank
// (CommonKVManager._prefill_unique_rank). The decode counts distinct numbers, so no two
// ranks of a prefill may share one.
func (p PrefillPosition) Rank() int {
	return (p.TPRank*p.PPSize+p.PPRank)*p.CPSize + p.CPRank
}

// SourceRank gives the number by which notifications name a prefill rank
// (NixlKVManager.transfer_source_rank up to 0.5.22): tpSize is the server's whole TP size,
// engineRank the global TP rank. It leaves out CP, unlike [PrefillPosition.Rank].
func SourceRank(ppRank, tpSize, engineRank int) int { return ppRank*tpSize + engineRank }

func checkRank(rank int) error {
	if rank < 0 || rank > maxInt {
		return malformed("prefill rank %d", rank)
	}
	return nil
}
