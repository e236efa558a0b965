//! Arguments in the memory of another device: every operator rejects each of its arguments by name. In the simulator with two
//! devices, and on two GPUs if available.

/// Asserts that the operator `call` runs if all arguments are on its device, and rejects each of `names`, in this order, if not.
macro_rules! judge {
    ($operator:expr, $names:expr, $call:expr $(,)?) => {
        crate::other_device::judge(&crate::other_device::simulated(), $operator, $names, $call);
        if let Some(gpus) = crate::other_device::gpus() {
            crate::other_device::judge(gpus, $operator, $names, $call);
        }
    };
}

mod attention;
mod layers;
mod sampling;

use std::sync::OnceLock;
use tilewright::{Dtype, Result, View, ViewMut, tensor::DeviceMemory};
use tilewright_cuda::{Device, Gpu, Simulator, machine::Machine};

/// Bytes of each argument.
const BYTES: usize = 4096;

/// Two devices of one machine.
type Two<M> = [Gpu<M>; 2];

fn simulated() -> Two<Simulator> {
    let simulator = Simulator::new(80, 2);
    [Gpu::new(simulator.clone()), Gpu::new(simulator.as_device(1))]
}

fn gpus() -> Option<&'static Two<Device>> {
    static GPUS: OnceLock<Option<Two<Device>>> = OnceLock::new();
    let open = || match (Device::open(0), Device::open(1)) {
        (Ok(first), Ok(second)) => Some([Gpu::new(first), Gpu::new(second)]),
        (Err(why), _) | (_, Err(why)) => {
            println!("skipped on GPUs, as it takes two: {why}");
            None
        }
    };
    GPUS.get_or_init(open).as_ref()
}

fn zeros<M: Machine>(gpu: &Gpu<M>) -> DeviceMemory {
    gpu.upload(&[0; BYTES]).expect("there is room")
}

fn view<'a>(memory: &'a DeviceMemory, shape: &[usize]) -> View<'a> {
    memory.view(Dtype::F32, 0, shape).expect("it fits")
}

fn view_mut<'a>(memory: &'a mut DeviceMemory, shape: &[usize]) -> ViewMut<'a> {
    memory.view_mut(Dtype::F32, 0, shape).expect("it fits")
}

fn judge<M: Machine, const N: usize>(
    [here, there]: &Two<M>,
    operator: &str,
    names: [&str; N],
    call: impl Fn(&Gpu<M>, &mut [DeviceMemory; N]) -> Result<()>,
) {
    call(here, &mut names.map(|_| zeros(here))).unwrap_or_else(|why| panic!("{operator}: {why}"));
    for (wrong, name) in names.iter().enumerate() {
        let mut memory = names.map(|_| zeros(here));
        memory[wrong] = zeros(there);
        let text = call(here, &mut memory).expect_err(name).to_string();
        assert_eq!(text, format!("{operator}: {name} is in the memory of device 1, expected device 0"));
    }
}
