//go:build linux

package cuda

import (
	"bytes"
	"errors"
	"fmt"
)

// Device is one CUDA device: a GPU, or in MIG mode a compute instance of one.
type Device struct {
	Ordinal int // the number that CUDA and NIXL call it by in this process
	// UUID is that of the GPU or, where the driver tells (cuDeviceGetUuid_v2, CUDA 11.4),
	// of the MIG compute instance. All zero if the driver does not say.
	UUID [16]byte
	// GPUUUID is that of the GPU in either case (cuDeviceGetUuid); equal to UUID unless
	// the device is a MIG instance.
	GPUUUID  [16]byte
	Name     string
	PCIBusID string // as CUDA writes it, such as 0000:3B:00.0
	Memory   uint64 // bytes in total (cuDeviceTotalMem)
}

// enumeration is the part of the driver API that lists devices. A function that may be
// missing is nil.
type enumeration struct {
	count    func(n *int32) Code
	get      func(dev *int32, ordinal int32) Code
	name     func(buf *byte, size int32, dev int32) Code
	pciBusID func(buf *byte, size int32, dev int32) Code
	totalMem func(bytes *uint64, dev int32) Code
	uuid     func(uuid *[16]byte, dev int32) Code
	uuidV2   func(uuid *[16]byte, dev int32) Code
}

// Devices lists the devices that this process sees, by ordinal. It makes no context.
//
// It tells all it can learn: the error joins what went wrong, and what a device did not
// say is left zero. A device that cannot be opened is left out. Without devices the
// error says why, or is nil if there are none.
func (d *Driver) Devices() ([]Device, error) {
	var e enumeration
	if err := errors.Join(
		d.Bind(&e.count, "cuDeviceGetCount"),
		d.Bind(&e.get, "cuDeviceGet"),
		d.Bind(&e.name, "cuDeviceGetName"),
		d.Bind(&e.pciBusID, "cuDeviceGetPCIBusId"),
		d.Bind(&e.totalMem, "cuDeviceTotalMem_v2"),
	); err != nil {
		return nil, err
	}
	if err := errors.Join(
		d.Bind(&e.uuidV2, "cuDeviceGetUuid_v2"),
		d.Bind(&e.uuid, "cuDeviceGetUuid"),
	); e.uuid == nil && e.uuidV2 == nil {
		return nil, err
	}
	var n int32
	if err := d.Check("cuDeviceGetCount", e.count(&n)); err != nil {
		return nil, err
	}
	var devices []Device
	var errs []error
	for ordinal := range int(n) {
		dev, err := d.device(&e, ordinal)
		if err != nil {
			errs = append(errs, fmt.Errorf("CUDA ordinal %d: %w", ordinal, err))
		}
		if dev != nil {
			devices = append(devices, *dev)
		}
	}
	return devices, errors.Join(errs...)
}

// device describes one device, nil if it cannot be opened.
func (d *Driver) device(e *enumeration, ordinal int) (*Device, error) {
	var handle int32
	if err := d.Check("cuDeviceGet", e.get(&handle, int32(ordinal))); err != nil {
		return nil, err
	}
	dev := &Device{Ordinal: ordinal}
	text := func(call string, get func(*byte, int32, int32) Code) (string, error) {
		buf := make([]byte, maxString)
		if err := d.Check(call, get(&buf[0], int32(len(buf)), handle)); err != nil {
			return "", err
		}
		end := bytes.IndexByte(buf, 0)
		if end < 0 {
			end = len(buf)
		}
		return string(buf[:end]), nil
	}
	var errs [5]error
	dev.Name, errs[0] = text("cuDeviceGetName", e.name)
	dev.PCIBusID, errs[1] = text("cuDeviceGetPCIBusId", e.pciBusID)
	errs[2] = d.Check("cuDeviceTotalMem_v2", e.totalMem(&dev.Memory, handle))
	dev.GPUUUID, errs[3] = uuid(d, "cuDeviceGetUuid", e.uuid, handle)
	dev.UUID, errs[4] = uuid(d, "cuDeviceGetUuid_v2", e.uuidV2, handle)
	var none [16]byte
	switch none { // one stands in for the other
	case dev.UUID:
		dev.UUID = dev.GPUUUID
	case dev.GPUUUID:
		dev.GPUUUID = dev.UUID
	}
	return dev, errors.Join(errs[:]...)
}

// uuid asks one of the functions for a UUID; all zero if it is missing or fails.
func uuid(d *Driver, call string, get func(*[16]byte, int32) Code, dev int32) ([16]byte, error) {
	var id [16]byte
	if get == nil {
		return id, nil
	}
	if err := d.Check(call, get(&id, dev)); err != nil {
		return [16]byte{}, err
	}
	return id, nil
}
