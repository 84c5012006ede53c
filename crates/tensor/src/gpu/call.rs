//! A line of the table of kernels as what an accelerator launches.

use std::ffi::c_void;
use std::ops::Range;

use super::order::{DeviceStream, Use, WHOLE};
use super::pass::CValue;
use super::twin::OperandKind;
use super::{DeviceMemory, Gpu};
use crate::device::Device;
use crate::dtype::Dtype;
use crate::tensor::Tensor;

/// A kernel and its parameters, in the order of the table: what it writes, what it reads, the rest.
#[derive(Debug, Default)]
pub(crate) struct Launch {
    pub(super) module: &'static str,
    pub(super) name: &'static str,
    parameters: Vec<CValue>,
    operands: Vec<LaunchOperand>,
    /// Of a block, if not as many as of most kernels'.
    pub(super) threads: Option<u32>,
}

/// Memory that a kernel uses.
#[derive(Debug)]
pub(super) struct LaunchOperand {
    pub(super) address: u64,
    pub(super) used: Use,
    /// Bytes that the kernel may touch, from the first on, and bytes that there are.
    pub(super) bytes: usize,
    pub(super) capacity: usize,
    /// Those that it does touch, if others use the rest meanwhile.
    pub(super) touched: Range<usize>,
}

impl Launch {
    /// Pointers to the parameters.
    pub(super) fn parameters(&self) -> Vec<*const c_void> {
        self.parameters.iter().map(CValue::pointer).collect()
    }

    pub(super) fn operands(&self) -> &[LaunchOperand] {
        &self.operands
    }
}

/// Elements in an accelerator's memory, from its address on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceElements {
    address: u64,
    dtype: Dtype,
    len: usize,
    /// Bytes of the memory.
    capacity: usize,
}

impl DeviceElements {
    pub(crate) fn new(memory: &DeviceMemory, dtype: Dtype, len: usize) -> DeviceElements {
        DeviceElements { address: memory.address(), dtype, len, capacity: memory.bytes() }
    }

    pub(super) fn address(self) -> u64 {
        self.address
    }

    pub(super) fn dtype(self) -> Dtype {
        self.dtype
    }

    pub(super) fn len(self) -> usize {
        self.len
    }
}

/// A launch in the making.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    gpu: &'a Gpu,
    device: &'a Device,
    launch: Launch,
    /// Lists that are arguments.
    lists: Vec<DeviceMemory>,
}

impl<'a> Call<'a> {
    pub(crate) fn new(gpu: &'a Gpu, device: &'a Device, module: &'static str, name: &'static str) -> Call<'a> {
        Call { gpu, device, launch: Launch { module, name, ..Launch::default() }, lists: Vec::new() }
    }

    #[track_caller]
    pub(crate) fn output(&mut self, tensor: &mut Tensor, kind: OperandKind) {
        tensor.assert_unique();
        self.write(tensor.device_elements(), kind);
    }

    #[track_caller]
    pub(crate) fn input(&mut self, tensor: &Tensor, kind: OperandKind) {
        self.read(tensor.device_elements(), kind);
    }

    #[track_caller]
    pub(crate) fn write(&mut self, elements: DeviceElements, kind: OperandKind) {
        self.operand(elements, kind, Use::Write);
    }

    /// Of which the kernel touches some bytes alone.
    #[track_caller]
    pub(crate) fn write_part(&mut self, elements: DeviceElements, kind: OperandKind, bytes: Range<usize>) {
        self.write(elements, kind);
        self.launch.operands.last_mut().expect("the operand above").touched = bytes;
    }

    #[track_caller]
    pub(crate) fn read(&mut self, elements: DeviceElements, kind: OperandKind) {
        self.operand(elements, kind, Use::Read);
    }

    #[track_caller]
    fn operand(
        &mut self,
        DeviceElements { address, dtype, len, capacity }: DeviceElements,
        kind: OperandKind,
        used: Use,
    ) {
        assert!(kind.takes(dtype), "{}: elements of {dtype:?} as {kind:?}", self.launch.name);
        let mut value = CValue::default();
        value.u64(address);
        value.usize(len);
        if kind == OperandKind::Any {
            value.u32(dtype as u32);
        }
        self.launch.operands.push(LaunchOperand {
            address,
            used,
            bytes: len * dtype.bytes(),
            capacity,
            touched: WHOLE,
        });
        self.argument(value);
    }

    pub(super) fn argument(&mut self, value: CValue) {
        self.launch.parameters.push(value);
    }

    /// Brings elements of a list to the device: a `Span` of them.
    pub(super) fn span(&mut self, elements: &[CValue]) -> [u64; 2] {
        let bytes = CValue::list(elements);
        let memory = self.device.take_memory(self.gpu, bytes.len());
        memory.write(0, &bytes);
        let (address, capacity) = (memory.address(), memory.bytes());
        self.launch.operands.push(LaunchOperand {
            address,
            used: Use::Read,
            bytes: bytes.len(),
            capacity,
            touched: WHOLE,
        });
        self.lists.push(memory);
        [address, elements.len() as u64]
    }

    pub(crate) fn launch(self) {
        self.launch_on(DeviceStream::Compute);
    }

    /// The same with so many threads in a block.
    pub(crate) fn launch_by(mut self, threads: u32) {
        self.launch.threads = Some(threads);
        self.launch();
    }

    /// Lists are arguments on the stream of kernels alone: there they are brought, and there their memory is taken again.
    pub(crate) fn launch_on(self, stream: DeviceStream) {
        assert!(stream == DeviceStream::Compute || self.lists.is_empty(), "{}: a list on {stream:?}", self.launch.name);
        self.gpu.engine.launch(stream, &self.launch);
        // Whoever takes this memory next uses it on the same stream, after this launch.
        self.lists.into_iter().for_each(|memory| self.device.give_memory(memory));
    }
}
