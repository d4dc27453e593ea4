package bootstrap

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/nixlkv/nixlkv"
	"github.com/nixlkv/nixlkv/internal/ratelog"
	"github.com/nixlkv/nixlkv/internal/trust"
	"go.uber.org/zap"
)

// Bounds on request bodies, in bytes. A rank takes less than 1 KiB, a DSpark layout adds a
// few numbers a layer.
const (
	maxRankBody  = 256 << 10
	maxRoomBody  = 4 << 10
	maxQueryBody = 1 << 20
	// maxQueryRooms bounds the rooms of one query.
	maxQueryRooms = 1 << 16
)

// Server is the bootstrap server of one prefill: an http.Handler, and with Listen or Serve a
// server of its own. It answers as SGLang's does (CommonKVBootstrapServer), but counts
// distinct ranks. All methods are safe for concurrent use.
//
//	PUT  /route             a rank registers; 400 if it disagrees with the ranks before it
//	GET  /route?…=-1        Topology
//	GET  /route?…           a rank's address; 404 if there is no such rank
//	POST /register_dp_rank  {"bootstrap_room", "dp_rank"}
//	POST /query_dp_ranks    {"bootstrap_rooms"} → {"room": rank}
//	GET  /health            OK
//
// GET /route is 503 until all ranks have registered. A rank that registers again replaces its
// address; the other values are those of the first rank for good, or until Forget.
type Server struct {
	log     *zap.Logger
	now     func() time.Time
	token   [sha256.Size]byte
	guarded bool
	admits  func(netip.Addr) bool
	mux     *http.ServeMux
	alone   standalone

	mu    sync.Mutex
	ranks rankTable
	rooms roomTable
}

var _ http.Handler = (*Server)(nil)

// NewServer gives a server that no rank has registered at.
func NewServer(opts ...ServerOption) *Server {
	c := serverConfig{
		log: zap.NewNop(), now: time.Now,
		roomTTL: DefaultRoomTTL, maxRooms: DefaultMaxRooms, maxRanks: MaxRanks,
	}
	for _, o := range opts {
		if o != nil {
			o(&c)
		}
	}
	s := &Server{
		log: ratelog.Sampled(c.log), now: c.now,
		token: sha256.Sum256([]byte("Bearer " + c.token)), guarded: c.token != "",
		admits: admitting(c.allowed),
		mux:    http.NewServeMux(),
		ranks:  rankTable{limit: c.maxRanks},
		rooms:  roomTable{limit: c.maxRooms, ttl: c.roomTTL},
	}
	s.mux.HandleFunc("PUT /route", s.putRoute)
	s.mux.HandleFunc("/route", s.getRoute)
	s.mux.HandleFunc("POST /register_dp_rank", s.registerDPRank)
	s.mux.HandleFunc("POST /query_dp_ranks", s.queryDPRanks)
	s.mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { replyText(w, http.StatusOK, "OK") })
	s.alone.init(s, c)
	return s
}

// ServeHTTP answers one request. The limits on how long a client may take are the enclosing
// http.Server's.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != pathHealth {
		from, err := netip.ParseAddrPort(r.RemoteAddr) // no address is in no network
		if s.admits != nil && (err != nil || !s.admits(from.Addr())) {
			s.log.Warn("bootstrap request refused", zap.String("from", r.RemoteAddr), zap.String("path", r.URL.Path))
			replyText(w, http.StatusForbidden, "not an allowed client")
			return
		}
	}
	if s.guarded && r.URL.Path != pathHealth {
		// Digests are compared, so that the time taken tells neither text nor length.
		got := sha256.Sum256([]byte(r.Header.Get("Authorization")))
		if subtle.ConstantTimeCompare(got[:], s.token[:]) == 0 {
			w.Header().Set("WWW-Authenticate", "Bearer")
			replyText(w, http.StatusUnauthorized, "token required")
			return
		}
	}
	s.mux.ServeHTTP(w, r)
}

// admitting gives whether an address is in one of some networks; nil if all are.
func admitting(networks []netip.Prefix) func(netip.Addr) bool {
	l, err := trust.NewList(networks...)
	switch {
	case err != nil:
		return func(netip.Addr) bool { return false }
	case l.Everywhere():
		return nil
	}
	return l.Allows
}

// Forget drops all ranks and rooms, as if the server were new: for a server that outlives the
// prefill it serves.
func (s *Server) Forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ranks = rankTable{limit: s.ranks.limit}
	s.rooms = roomTable{limit: s.rooms.limit, ttl: s.rooms.ttl}
}

// Topology gives what a decode would be told; an error wraps nixlkv.ErrNotReady.
func (s *Server) Topology() (Topology, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ranks.topology()
}

func (s *Server) putRoute(w http.ResponseWriter, r *http.Request) {
	body, err := readBody(w, r, maxRankBody)
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	info, err := ParseRankInfo(body)
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	s.mu.Lock()
	err = s.ranks.add(info)
	have, want, overruled := len(s.ranks.ranks), s.ranks.topo.Ranks(), s.ranks.overruled(info.Topology())
	s.mu.Unlock()
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	id := info.ID()
	log := s.log.With(zap.Int("dp", id.DP), zap.Int("cp", id.CP), zap.Int("tp", id.TP), zap.Int("pp", id.PP),
		zap.Stringer("address", info.Endpoint()))
	if overruled != "" {
		log.Warn("prefill rank differs from the first one, whose value counts", zap.String("value", overruled))
	}
	log.Info("prefill rank registered", zap.Int("ranks", have), zap.Int("of", want))
	replyText(w, http.StatusOK, "OK")
}

func (s *Server) getRoute(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet {
		w.Header().Set("Allow", "GET, PUT")
		replyText(w, http.StatusMethodNotAllowed, "method not allowed")
		return
	}
	id, err := parseRankQuery(r.URL.Query())
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	var answer any
	s.mu.Lock()
	if id == wholePrefill {
		answer, err = s.ranks.topology()
	} else {
		var e Endpoint
		e, err = s.ranks.find(id)
		answer = rankReply{IP: e.Host, Port: e.Port}
	}
	s.mu.Unlock()
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	s.replyJSON(w, r, answer)
}

func (s *Server) registerDPRank(w http.ResponseWriter, r *http.Request) {
	body, err := readBody(w, r, maxRoomBody)
	if err == nil {
		var room nixlkv.Room
		var rank int
		if room, rank, err = parseRoomRank(body); err == nil {
			err = s.placeRoom(room, rank)
		}
	}
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	replyText(w, http.StatusOK, "OK")
}

func (s *Server) placeRoom(room nixlkv.Room, rank int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	// A room may be known before its ranks are; what contradicts known ranks is refused.
	if len(s.ranks.ranks) > 0 && rank >= s.ranks.topo.DPSize {
		return fmt.Errorf("%w: dp_rank %d of %d", nixlkv.ErrMalformed, rank, s.ranks.topo.DPSize)
	}
	return s.rooms.set(room, rank, s.now())
}

func (s *Server) queryDPRanks(w http.ResponseWriter, r *http.Request) {
	body, err := readBody(w, r, maxQueryBody)
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	rooms, err := parseRooms(body)
	if err != nil {
		s.refuse(w, r, err)
		return
	}
	found := make(map[nixlkv.Room]int)
	s.mu.Lock()
	now := s.now()
	for _, room := range rooms {
		if rank, ok := s.rooms.get(room, now); ok {
			found[room] = rank
		}
	}
	s.mu.Unlock()
	s.replyJSON(w, r, found)
}

// wholePrefill is the rank that asks for the topology.
var wholePrefill = RankID{DP: -1, CP: -1, TP: -1, PP: -1}

// rankReply is the wire form of a rank's address.
type rankReply struct {
	IP   string `json:"rank_ip"`
	Port int    `json:"rank_port"`
}

// rankParams are the parameters of GET /route, in the order in which RankID.params gives them.
var rankParams = [...]string{"prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"}

func parseRankQuery(q url.Values) (RankID, error) {
	var v [len(rankParams)]int
	for i, name := range rankParams {
		text := q.Get(name)
		if text == "" {
			return RankID{}, fmt.Errorf("%w: parameter %s is missing", nixlkv.ErrMalformed, name)
		}
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return RankID{}, fmt.Errorf("%w: parameter %s is %s", nixlkv.ErrMalformed, name, excerpt([]byte(text)))
		}
		v[i] = int(n)
	}
	return RankID{DP: v[0], CP: v[1], TP: v[2], PP: v[3]}, nil
}

func (id RankID) params() url.Values {
	q := make(url.Values, len(rankParams))
	for i, n := range [...]int{id.DP, id.CP, id.TP, id.PP} {
		q.Set(rankParams[i], strconv.Itoa(n))
	}
	return q
}

func parseRoomRank(b []byte) (nixlkv.Room, int, error) {
	f, err := parseFields(b)
	if err != nil {
		return 0, 0, err
	}
	rank := f.number("dp_rank", 0, MaxRanks-1)
	room, err := nixlkv.ParseRoom(f.get("bootstrap_room"))
	if err != nil {
		f.fail("bootstrap_room", "%v", err)
	}
	return room, rank, f.err()
}

func parseRooms(b []byte) ([]nixlkv.Room, error) {
	f, err := parseFields(b)
	if err != nil {
		return nil, err
	}
	var raw []json.RawMessage
	v := f.get("bootstrap_rooms")
	if v == nil {
		return nil, fmt.Errorf("%w: bootstrap_rooms: missing", nixlkv.ErrMalformed)
	}
	if err := json.Unmarshal(v, &raw); err != nil {
		return nil, fmt.Errorf("%w: bootstrap_rooms: %w", nixlkv.ErrMalformed, err)
	}
	if len(raw) > maxQueryRooms {
		return nil, fmt.Errorf("%w: %d rooms in one query, at most %d", nixlkv.ErrLimit, len(raw), maxQueryRooms)
	}
	rooms := make([]nixlkv.Room, len(raw))
	for i, r := range raw {
		if rooms[i], err = nixlkv.ParseRoom(r); err != nil {
			return nil, fmt.Errorf("bootstrap_rooms: %w", err)
		}
	}
	return rooms, nil
}

func readBody(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, error) {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return nil, fmt.Errorf("%w: request body of more than %d bytes", nixlkv.ErrLimit, limit)
	case err != nil:
		return nil, fmt.Errorf("%w: request body: %w", nixlkv.ErrMalformed, err)
	}
	return b, nil
}

// refuse answers with the code that SGLang's server has for a failure, and its text.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	code := http.StatusBadRequest
	switch {
	case errors.Is(err, nixlkv.ErrNotReady):
		code = http.StatusServiceUnavailable
	case errors.Is(err, nixlkv.ErrNoSuchRank):
		code = http.StatusNotFound
	case errors.Is(err, errRoomsFull): // room comes with time
		code = http.StatusTooManyRequests
	case errors.Is(err, nixlkv.ErrLimit):
		code = http.StatusRequestEntityTooLarge
	}
	level := zap.WarnLevel
	if code == http.StatusServiceUnavailable {
		level = zap.DebugLevel // decodes ask until the prefill is ready
	}
	s.log.Log(level, "bootstrap request refused", zap.String("method", r.Method), zap.String("path", r.URL.Path),
		zap.String("from", r.RemoteAddr), zap.Int("code", code), zap.Error(err))
	replyText(w, code, err.Error())
}

func (s *Server) replyJSON(w http.ResponseWriter, r *http.Request, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		// All that is stored was validated as JSON when it came in.
		s.log.Error("bootstrap reply", zap.String("path", r.URL.Path), zap.Error(err))
		replyText(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	_, _ = w.Write(b) // the client is gone if it fails
}

func replyText(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Content-Length", strconv.Itoa(len(text)))
	w.WriteHeader(code)
	_, _ = io.WriteString(w, text)
}
