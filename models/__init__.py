"""The paper's architectures: a ReLU MLP, the CIFAR ResNet-18 and GPT-2, each with a muP readout."""
