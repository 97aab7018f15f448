// Stands in for NVIDIA's driver where there is none. It is loaded before everything else, under the driver's name.
//
// torch counts devices twice. At its start there must be none, so that it installs its guard that switches nothing;
// when autograd asks for the contexts of devices, they must exist.
static int num_devices = 0;

void set_num_devices(int count) { num_devices = count; }

// c10::cuda::device_count() of torch, which this one precedes
signed char _ZN3c104cuda12device_countEv(void) { return (signed char)num_devices; }

// autograd asks it where a context is alive: nowhere
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    (void)device;
    *flags = 0;
    *active = 0;
    return 0;
}
