//! Arguments in the memory of another device: every operator refuses each of its own by name. In the simulator with two, and on two
//! GPUs where there are so many.

/// The operator `call` runs with all arguments on its device, and refuses those where one is not, in the order of `names`.
macro_rules! judge {
    ($operator:expr, $names:expr, $call:expr $(,)?) => {
        crate::judge(&crate::simulated(), $operator, $names, $call);
        if let Some(cards) = crate::cards() {
            crate::judge(cards, $operator, $names, $call);
        }
    };
}

#[path = "other_device/attention.rs"]
mod attention;
#[path = "other_device/layers.rs"]
mod layers;
#[path = "other_device/sampling.rs"]
mod sampling;

use std::sync::OnceLock;
use tilewright::{Dtype, Result, View, ViewMut, tensor::DeviceMemory};
use tilewright_cuda::{Card, Gpu, Simulator, machine::Machine};

/// Bytes of every argument.
const BYTES: usize = 4096;

/// Two devices of one machine.
type Two<M> = [Gpu<M>; 2];

fn simulated() -> Two<Simulator> {
    let simulator = Simulator::new(80, 2);
    [Gpu::new(simulator.clone()), Gpu::new(simulator.as_device(1))]
}

fn cards() -> Option<&'static Two<Card>> {
    static CARDS: OnceLock<Option<Two<Card>>> = OnceLock::new();
    let open = || match (Card::open(0), Card::open(1)) {
        (Ok(first), Ok(second)) => Some([Gpu::new(first), Gpu::new(second)]),
        (Err(why), _) | (_, Err(why)) => {
            println!("skipped on GPUs, as it takes two: {why}");
            None
        }
    };
    CARDS.get_or_init(open).as_ref()
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
