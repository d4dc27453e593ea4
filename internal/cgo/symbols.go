package cgo

import (
	"fmt"
	"strings"

	"github.com/ebitengine/purego"

	"github.com/nixlkv/nixlkv/internal/engine"
)

// symbol is a function of the library by its index in names.
type symbol int

// The functions that this engine calls, grouped as in NIXL's wrapper.h. The order of the
// ones up to symHotEnd is also the order of the shim's table (shim.h).
const (
	symListAdd symbol = iota
	symListClear
	symCreateByList
	symCreateByIndex
	symPost
	symStatus
	symOptCreate
	symOptDestroy
	symOptNotif
	symOptHasNotif
	symOptSkipMerge
	symGetNotifs
	symNotifMapSize
	symNotifMapAgent
	symNotifMapCount
	symNotifMapGet
	symNotifMapClear
	symRelease
	symDestroyRequest
	symGenNotif
	symHotEnd
)

const (
	symCreateAgent symbol = iota + symHotEnd
	symDestroyAgent
	symGetLocalMD
	symLoadRemoteMD
	symCheckRemoteMD
	symInvalidateRemoteMD
	symMakeConnection
	symGetPlugins
	symStringListSize
	symStringListGet
	symDestroyStringList
	symPluginParams
	symBackendParams
	symCreateBackend
	symDestroyBackend
	symParamsAdd
	symParamsEmpty
	symParamsIter
	symParamsNext
	symDestroyParamsIter
	symDestroyParams
	symMemListSize
	symMemListGet
	symDestroyMemList
	symCreateRegList
	symRegListAdd
	symDestroyRegList
	symRegisterMem
	symDeregisterMem
	symCreateList
	symDestroyList
	symPrepare
	symReleasePrepared
	symTelemetry
	symEstimateCost
	symCreateNotifMap
	symDestroyNotifMap
	symIsStub
	symEnd
)

var names = [symEnd]string{
	symListAdd:            "nixl_capi_xfer_dlist_add_desc",
	symListClear:          "nixl_capi_xfer_dlist_clear",
	symCreateByList:       "nixl_capi_create_xfer_req",
	symCreateByIndex:      "nixl_capi_make_xfer_req",
	symPost:               "nixl_capi_post_xfer_req",
	symStatus:             "nixl_capi_get_xfer_status",
	symOptCreate:          "nixl_capi_create_opt_args",
	symOptDestroy:         "nixl_capi_destroy_opt_args",
	symOptNotif:           "nixl_capi_opt_args_set_notif_msg",
	symOptHasNotif:        "nixl_capi_opt_args_set_has_notif",
	symOptSkipMerge:       "nixl_capi_opt_args_set_skip_desc_merge",
	symGetNotifs:          "nixl_capi_get_notifs",
	symNotifMapSize:       "nixl_capi_notif_map_size",
	symNotifMapAgent:      "nixl_capi_notif_map_get_agent_at",
	symNotifMapCount:      "nixl_capi_notif_map_get_notifs_size",
	symNotifMapGet:        "nixl_capi_notif_map_get_notif",
	symNotifMapClear:      "nixl_capi_notif_map_clear",
	symCreateAgent:        "nixl_capi_create_configured_agent",
	symDestroyAgent:       "nixl_capi_destroy_agent",
	symGetLocalMD:         "nixl_capi_get_local_md",
	symLoadRemoteMD:       "nixl_capi_load_remote_md",
	symCheckRemoteMD:      "nixl_capi_check_remote_md",
	symInvalidateRemoteMD: "nixl_capi_invalidate_remote_md",
	symMakeConnection:     "nixl_capi_agent_make_connection",
	symGetPlugins:         "nixl_capi_get_available_plugins",
	symStringListSize:     "nixl_capi_string_list_size",
	symStringListGet:      "nixl_capi_string_list_get",
	symDestroyStringList:  "nixl_capi_destroy_string_list",
	symPluginParams:       "nixl_capi_get_plugin_params",
	symBackendParams:      "nixl_capi_get_backend_params",
	symCreateBackend:      "nixl_capi_create_backend",
	symDestroyBackend:     "nixl_capi_destroy_backend",
	symParamsAdd:          "nixl_capi_params_add",
	symParamsEmpty:        "nixl_capi_params_is_empty",
	symParamsIter:         "nixl_capi_params_create_iterator",
	symParamsNext:         "nixl_capi_params_iterator_next",
	symDestroyParamsIter:  "nixl_capi_params_destroy_iterator",
	symDestroyParams:      "nixl_capi_destroy_params",
	symMemListSize:        "nixl_capi_mem_list_size",
	symMemListGet:         "nixl_capi_mem_list_get",
	symDestroyMemList:     "nixl_capi_destroy_mem_list",
	symCreateRegList:      "nixl_capi_create_reg_dlist",
	symRegListAdd:         "nixl_capi_reg_dlist_add_desc",
	symDestroyRegList:     "nixl_capi_destroy_reg_dlist",
	symRegisterMem:        "nixl_capi_register_mem",
	symDeregisterMem:      "nixl_capi_deregister_mem",
	symCreateList:         "nixl_capi_create_xfer_dlist",
	symDestroyList:        "nixl_capi_destroy_xfer_dlist",
	symPrepare:            "nixl_capi_prep_xfer_dlist",
	symReleasePrepared:    "nixl_capi_release_xfer_dlist_handle",
	symRelease:            "nixl_capi_release_xfer_req",
	symDestroyRequest:     "nixl_capi_destroy_xfer_req",
	symTelemetry:          "nixl_capi_get_xfer_telemetry",
	symEstimateCost:       "nixl_capi_estimate_xfer_cost",
	symGenNotif:           "nixl_capi_gen_notif",
	symCreateNotifMap:     "nixl_capi_create_notif_map",
	symDestroyNotifMap:    "nixl_capi_destroy_notif_map",
	symIsStub:             "nixl_capi_is_stub",
}

// required lists what no release is usable without. Everything else is looked up when it
// is called first: older releases lack some of it.
var required = []symbol{
	symListAdd, symListClear, symCreateByList, symPost, symStatus,
	symOptCreate, symOptDestroy, symOptNotif, symOptHasNotif,
	symGetNotifs, symNotifMapSize, symNotifMapAgent, symNotifMapCount, symNotifMapGet, symNotifMapClear,
	symCreateAgent, symDestroyAgent, symGetLocalMD, symLoadRemoteMD, symInvalidateRemoteMD,
	symPluginParams, symCreateBackend, symDestroyParams, symDestroyMemList,
	symCreateRegList, symRegListAdd, symDestroyRegList, symRegisterMem, symDeregisterMem,
	symCreateList, symDestroyList, symRelease, symDestroyRequest, symCreateNotifMap, symDestroyNotifMap,
}

// table holds the address of every symbol, zero where the library has none.
type table [symEnd]uintptr

// resolve looks every symbol up in an opened library.
func resolve(handle uintptr) (*table, error) {
	t := new(table)
	for i, name := range names {
		if addr, err := purego.Dlsym(handle, name); err == nil {
			t[i] = addr
		}
	}
	var missing []string
	for _, s := range required {
		if t[s] == 0 {
			missing = append(missing, names[s])
		}
	}
	if missing != nil {
		return nil, fmt.Errorf("%w: the library lacks %s", engine.ErrUnsupported, strings.Join(missing, ", "))
	}
	return t, nil
}

// has returns an error naming the first symbol that the library lacks.
func (t *table) has(syms ...symbol) error {
	for _, s := range syms {
		if t[s] == 0 {
			return fmt.Errorf("%w: this release of the library has no %s", engine.ErrUnsupported, names[s])
		}
	}
	return nil
}

// check turns a status into an error that names the function.
func (s symbol) check(st engine.Status) error {
	if st >= 0 {
		return nil
	}
	return fmt.Errorf("%s: %w", names[s], st)
}
