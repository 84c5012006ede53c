//! A line of the table of kernels as what an accelerator launches.

use std::ffi::c_void;

use super::order::{DeviceStream, Use};
use super::pass::CValue;
use super::twin::OperandKind;
use super::{DeviceMemory, Gpu};
use crate::device::Device;
use crate::tensor::Tensor;

/// A kernel and its parameters, in the order of the table: what it writes, what it reads, the rest.
#[derive(Debug, Default)]
pub(crate) struct Launch {
    pub(super) module: &'static str,
    pub(super) name: &'static str,
    parameters: Vec<CValue>,
    operands: Vec<LaunchOperand>,
}

/// Memory that a kernel uses.
#[derive(Debug)]
pub(super) struct LaunchOperand {
    pub(super) address: u64,
    pub(super) used: Use,
    /// Bytes that the kernel may touch, from the first on, and bytes that there are.
    pub(super) bytes: usize,
    pub(super) capacity: usize,
}

impl LaunchOperand {
    fn of(memory: &DeviceMemory, used: Use, bytes: usize) -> LaunchOperand {
        LaunchOperand { address: memory.address(), used, bytes, capacity: memory.bytes() }
    }
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
        self.operand(tensor, kind, Use::Write);
    }

    #[track_caller]
    pub(crate) fn input(&mut self, tensor: &Tensor, kind: OperandKind) {
        self.operand(tensor, kind, Use::Read);
    }

    #[track_caller]
    fn operand(&mut self, tensor: &Tensor, kind: OperandKind, used: Use) {
        let (memory, dtype) = (tensor.memory(), tensor.dtype());
        assert!(kind.takes(dtype), "{}: a tensor of {dtype:?} as {kind:?}", self.launch.name);
        let mut value = CValue::default();
        value.u64(memory.address());
        value.usize(tensor.len());
        if kind == OperandKind::Any {
            value.u32(dtype as u32);
        }
        self.launch.operands.push(LaunchOperand::of(memory, used, tensor.len() * dtype.bytes()));
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
        self.launch.operands.push(LaunchOperand::of(&memory, Use::Read, bytes.len()));
        let address = memory.address();
        self.lists.push(memory);
        [address, elements.len() as u64]
    }

    pub(crate) fn launch(self) {
        self.gpu.engine.launch(DeviceStream::Compute, &self.launch);
        // Whoever takes this memory next uses it on the same stream, after this launch.
        self.lists.into_iter().for_each(|memory| self.device.give_memory(memory));
    }
}
